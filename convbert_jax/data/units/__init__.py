"""Units of work: parts of a source, each read sequentially by one process.

work.py           processing of the missing units by a runner
lock.py           lock of the folder that is prepared
processes.py      runner with local processes
beam_pipeline.py  runner with an Apache Beam pipeline
bucket.py         prepared folders in buckets, and their local copies
changes.py        detection of changed sources
"""
