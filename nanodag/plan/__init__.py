"""Memory, time, disk and price of a run before it starts, and what would not work. No torch.

stage_plan    what is said of a stage, and faults
case          a stage with its model, machine and sizes of its data, and what does not fit
sizes         rows and bytes of sources, as far as they are known
speeds        peaks of devices, and the share of them that each kind of work reaches
host_memory   memory of processes before their first tensor, and of those that answer the policy
supervised    pretraining, midtraining, SFT
rl            trainer and samplers
evaluation    written answers and likelihoods
small_stages  tokenizer, import, report
make          the plan of a whole pipeline
"""
