"""Runners of one sweep on a cluster with Slurm, by submitit.

submission.py  reads what the machine shall be, and puts the runners into the queue
job.py         what one of them is there: the command of launch/sweep.py, put back before its end
"""
