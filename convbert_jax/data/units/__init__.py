"""Units of work: parts of a source that one process reads from beginning to end.

work.py           what is done to them, which are there already, who does the others
lock.py           one process that prepares holds the folder
processes.py      they are done by processes of this machine
beam_pipeline.py  or by a pipeline of Apache Beam, if that is asked for
"""
