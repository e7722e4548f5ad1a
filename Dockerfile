# Two images of one project: the scheduler without torch, the executor with it.
#
#   docker build --target scheduler -t everystop-scheduler .
#   docker build --target executor -t everystop-executor .
#
# PIP_ARGS: more options for pip, such as another index. TORCH_SPEC: the torch to install; which build it is, for CPU or
# for CUDA, depends on the index.
#
# NOTE: the stages stand in this order because docker's classic builder builds all that stand before its target.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PATH=/opt/everystop/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/everystop
WORKDIR /src

FROM ${PYTHON_IMAGE} AS service
ENV PATH=/opt/everystop/bin:$PATH PYTHONDONTWRITEBYTECODE=1
RUN useradd --system --uid 10001 --create-home everystop
USER everystop
WORKDIR /home/everystop

FROM build AS build-scheduler
ARG PIP_ARGS=""
COPY . .
RUN pip install ${PIP_ARGS} -c constraints.txt '.[scheduler,tracing]'

FROM service AS scheduler
COPY --from=build-scheduler /opt/everystop /opt/everystop
ENV EVERYSTOP_SCHEDULER_LISTEN=0.0.0.0:50051
EXPOSE 50051
# Healthy: an executor is connected and requests are answered.
HEALTHCHECK --interval=5s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "-m", "everystop.health", "127.0.0.1:50051", "everystop.scheduler.v1.InferenceService"]
ENTRYPOINT ["everystop", "scheduler"]

FROM build AS build-executor
ARG PIP_ARGS=""
ARG TORCH_SPEC=torch==2.13.0
ARG EXTRAS=executor,tracing
# The large part first: it stays cached when the code changes.
COPY constraints.txt /
RUN { grep -v '^torch==' /constraints.txt; echo "${TORCH_SPEC}"; } > /pinned.txt && pip install ${PIP_ARGS} -c /pinned.txt torch
COPY . .
RUN pip install ${PIP_ARGS} -c /pinned.txt ".[${EXTRAS}]"

FROM service AS executor
USER root
# Models that are fetched and converted at the first start; a volume mounted here takes over the owner.
RUN mkdir -p /cache && chown everystop /cache
USER everystop
COPY --from=build-executor /opt/everystop /opt/everystop
ENV EVERYSTOP_CACHE=/cache/everystop HF_HOME=/cache/huggingface EVERYSTOP_EXECUTOR_LISTEN=0.0.0.0:50052
VOLUME /cache
EXPOSE 50052
# Healthy: the model is loaded.
HEALTHCHECK --interval=5s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "-m", "everystop.health", "127.0.0.1:50052", "everystop.executor.v1.ExecutorService"]
ENTRYPOINT ["everystop", "executor"]
