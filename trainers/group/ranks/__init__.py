"""One learner over many ranks: parameters, gradients and optimizer sharded by torch's FSDP2, behind a group's usual face.

group.py                the group: engines, samples, and links to the ranks in place of learners
forked.py               ranks as processes of this machine
rank_actors.py          ranks as Ray actors
one_rank.py             one rank: its shards, its learners
fsdp.py                 models into shards
sharded_checkpoint.py   checkpoints of shards, which any number of ranks reads.
"""
