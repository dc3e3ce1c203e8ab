"""The embedded sampler: an inference server in a process of its own that speaks SGLang's protocol.

weights             safetensors -> tensors in the layout that decoding wants
fingerprints        what trainer and sampler compare after a change of weights
shared_tensors      weights that come in memory shared with the trainer
model               forward pass: prefill one or several prompts, decode one token for every slot
kernel              the same passes as one compiled call; the cache
steps               a step of all samples, in torch or by the kernel
drawing             temperature, top-p, top-k, and random numbers that depend on the request alone
slots               the table of samples that are being decoded, how many and how long they may be, and when streams
                    are told of them
text                the checkpoint's tokenizer
engine              continuous batching: requests submitted, and a token for each at every step
engine_loop         the thread that runs an engine for the server; requests in flight, and when weights may change
weight_group        the process group through which weights are broadcast
generation_server   the HTTP application; ``python -m nanodag.sampler JSON``
weight_endpoints    its endpoints about weights
device              the memory that the process holds of its device, and a trace of its work

The protocol itself and the client are in nanodag.inference.
"""
