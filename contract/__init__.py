"""What the packages share that meet over HTTP: one loader of plug-ins, one client, one set of errors.

It imports only `reconstruct`; everybody but `reconstruct` may import it. A name stands here only if two packages use it.
"""
