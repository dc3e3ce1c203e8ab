"""The OpenAI API over any engine that speaks SGLang's protocol: `nanodag serve`. No torch here.

Everything is asked of an engine as token ids; text, stop strings, tool calls and log-probabilities of text are made
here, so the embedded sampler and SGLang answer alike. `application.py` has the factory, `served_model.py` what it
serves, `command.py` the program.
"""
