"""What a run will take, said before it starts: memory, time, disk, price, and what would not work. No torch.

stage_plan    what is said of a stage, and faults
models        the model that a stage has, before there is one
sizes         rows and bytes of sources that are known
speeds        peaks of processors, and the share of them that each kind of work reaches
processes     what a process takes before its first tensor
supervised    pretraining, midtraining, SFT
rl            trainer and samplers
evaluation    written answers and likelihoods
others        tokenizer, import, report
make          the plan of a whole pipeline
"""
