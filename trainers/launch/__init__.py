"""Recipes that start a Ray cluster and run a training command on it: `unitymas launch slurm | kuberay | ssh`.

command.py     the command line: it prints a recipe, or hands it in
job.py         the job: a command, and the nodes that it wants
slurm.py       a script for sbatch
kuberay.py     a RayJob for Kubernetes
by_ssh.py      a script that starts Ray on hosts by ssh
gather.py      run inside a job: it waits until all nodes are there

No recipe knows ranks or places: the groups of a run find room on the cluster by themselves.
"""
