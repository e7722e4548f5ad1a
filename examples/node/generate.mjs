// A streamed answer: npm install, then node generate.mjs [HOST:PORT].

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const definition = protoLoader.loadSync("everystop/scheduler/v1/inference.proto", {
  includeDirs: [fileURLToPath(new URL("../../protos", import.meta.url))],
  keepCase: true, // names as in the .proto file
  longs: String, // a seed may be larger than Number.MAX_SAFE_INTEGER
  enums: String,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).everystop.scheduler.v1;
const client = new InferenceService(process.argv[2] ?? "127.0.0.1:50051", grpc.credentials.createInsecure());

const request = {
  text: "The capital of France is",
  sampling: { temperature: 0 },
  stop: { max_tokens: 16 },
};
const call = client.Generate(request, { deadline: Date.now() + 60_000 });
try {
  for await (const response of call) {
    if (response.event === "delta") {
      process.stdout.write(response.delta.text);
    } else if (response.event === "finished") {
      const { reason, usage } = response.finished;
      console.log(`\n${reason}, ${usage.num_output_tokens} tokens`);
    }
  }
} catch (error) {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
} finally {
  client.close();
}
