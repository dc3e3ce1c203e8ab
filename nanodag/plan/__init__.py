"""Memory, time, disk and price of a run before it starts, and what would not work. No torch.

stage_plan    what is said of a stage, and faults
case          a stage with its model, machine and sizes of its data
sizes         rows and bytes of sources, as far as they are known
speeds        peaks of processors, and the share of them that each kind of work reaches
processes     memory and start of a process before its first tensor
supervised    pretraining, midtraining, SFT
rl            trainer and samplers
evaluation    written answers and likelihoods
others        tokenizer, import, report
make          the plan of a whole pipeline
"""
