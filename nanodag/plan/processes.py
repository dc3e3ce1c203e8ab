"""What a process of each kind takes of host memory before its first tensor, shared pages counted by their share.

Measured on a CPU after the imports: trainer 205 MB, sampler 177, evaluation 197 (and 130 of lm-eval), controller 56. A
compiled layer costs 250 MB more, of torch's compiler. With CUDA a process maps more; 3 GiB is not measured.
"""

MB = 1_000_000
TRAINER = 205 * MB
COMPILER = 250 * MB
SAMPLER = 177 * MB
EVALUATION = 330 * MB
CONTROLLER = 110 * MB
REWARDS = 60 * MB
TOKENIZER = 60 * MB
REPORT = 270 * MB
IMPORT = 60 * MB
LAUNCHER = 150 * MB
"""torchrun's own, where a stage has several ranks; the watchdog's is lost beside it."""
CUDA = 3 << 30
"""Of a process that uses a GPU, beside what it holds."""
PARSED = 3.0
"""Bytes in memory for each byte of a JSON file, which is read as a whole."""
HOST_SHARE = 0.95
"""Of a machine's memory, that processes can fill."""

# CPU-seconds before the first step, measured with torch 2.13 on two cores.
TRAINER_S = 4.5
COMPILER_S = 4.5
SAMPLER_S = 3.0
EVALUATION_S = 3.4
CONTROLLER_S = 2.5
REWARDS_S = 1.5
SHORT_S = 1.0
"""Of a worker without a model."""
PARSED_BYTES_S = 100e6
"""Bytes of a JSON file that are read as a whole, in a second of a core."""
