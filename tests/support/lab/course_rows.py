"""The rows of every metrics table in the course's document: the unit of each name, by week."""

ROWS: dict[int, dict[str, str]] = {
    1: {"TTFT (p50, p99)": "ms", "ITL (p50, p99)": "ms", "Throughput": "tok/s", "Request latency (p50, p99)": "ms"},
    2: {"Offline throughput": "tok/s", "Per-token latency": "ms", "GPU utilization %": "%",
        "Kernel time breakdown": "%"},
    3: {"Measured decode latency": "ms", "Theoretical decode latency": "ms", "Arithmetic intensity": "FLOP/B",
        "HBM utilization %": "%"},
    4: {"HF baseline throughput": "tok/s", "vLLM throughput per max-num-seqs": "tok/s",
        "GPU blocks allocated": "blocks", "Memory waste %": "%"},
    5: {"TTFT (APC on vs off)": "ms", "Cache hit rate": "%", "TTFT vs prefix length": "ms",
        "GPU blocks (FP16 vs FP8)": "blocks"},
    6: {"TTFT (radix on/off)": "ms", "Cache hit rate": "%", "TTFT (LPM vs FCFS)": "ms"},
    7: {"Static batch throughput": "tok/s", "Continuous batch throughput": "tok/s", "Avg batch occupancy": "seqs"},
    8: {"ITL p50, p99": "ms", "TTFT p50, p99": "ms", "ITL p99/p50 ratio": "ratio"},
    9: {"Throughput per policy": "tok/s", "Cache hit rate per policy": "%", "TTFT p50, p99": "ms"},
    10: {"Decode latency (eager)": "ms", "Decode latency (graphs)": "ms", "Server startup time": "s",
         "Memory overhead": "MB"},
    11: {"Acceptance rate": "%", "Per-request latency": "ms", "Throughput at high QPS": "tok/s"},
    12: {"Memory": "GB", "Throughput": "tok/s", "GSM8K Accuracy": "%"},  # columns there; the rows are models
    13: {"Decode latency per TP": "ms", "All-reduce time": "us", "Communication fraction": "%"},
    14: {"GPU memory (Mixtral)": "GB", "Throughput (MoE vs dense)": "tok/s", "Expert load balance": "%"},
    15: {"TTFT (cold vs warm)": "ms", "Cache restore time": "ms", "Throughput per chunk_size": "tok/s"},
    16: {"KV transfer time": "ms", "TTFT (P/D vs standard)": "ms", "ITL (P/D vs standard)": "ms",
         "GPU utilization (prefill vs decode)": "%"},
}
