"""The scheduler: takes requests and decides, at every iteration, who boards, who leaves and which KV blocks each one owns."""
