"""Stock vLLM and the policy in alternation, through ``vllm bench throughput``."""
