"""The embedded sampler: an inference server in a process of its own that speaks SGLang's protocol.

weights       safetensors -> tensors in the layout that decoding wants
fingerprints  what trainer and sampler compare after a change of weights
model         forward pass: prefill one or several prompts, decode one token for every slot
drawing       temperature, top-p, top-k, and random numbers that depend on the request alone
slots         the table of samples that are being decoded
sizes         how many slots, how long, and the shapes of a step
invariance    the numbers of rows that give the same bits on this machine
text          the checkpoint's tokenizer
engine        continuous batching: Engine.generate for use in process
loop          the thread that runs an engine for the server
server        the HTTP application; ``python -m nanodag.sampler --model-path DIR``
"""
