"""The scheduler: takes requests; at every iteration decides who boards, who leaves and who owns which KV blocks."""
