"""Learning of a group's policies, from sealed samples and signals.

parameters.py   what a policy may change: a model of its own, or an adapter
targets.py      numbers per token from one number per decision
packing.py      samples into packed micro-batches, with common prefixes computed once
dealing.py      micro-batches to ranks
batch.py        the input of a loss
losses.py       parts of losses
update.py       the optimizer steps.
"""
