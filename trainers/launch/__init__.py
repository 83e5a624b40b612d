"""Launch recipes that start a Ray cluster and run a training command on it: `unitymas launch slurm | kuberay | ssh`.

launch_command.py is the command line: it prints or submits a recipe. job.py describes the job: a command and its nodes.
slurm.py makes a script for sbatch, kuberay.py a RayJob for Kubernetes, and by_ssh.py a script that starts Ray on hosts
by ssh. gather.py runs inside a job, and waits until all nodes have joined.

Recipes do not place ranks or groups: the groups of a run find room on the cluster by themselves.
"""
