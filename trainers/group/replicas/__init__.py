"""Several engines with the same weights for one group, and a router of requests over them.

router.py        the choice of a replica: common prefixes stay together, loads stay even
replicated.py    the replicas as one engine
distant.py       a replica in a Ray actor.
"""
