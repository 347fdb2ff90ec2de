"""The seams.  One file each: the class that a plug-in implements, its contract, and the small frozen context it gets.

Importing this package imports numpy and no torch.  ``API`` in each file is the contract's (major, minor): a new
optional method, context field or feature raises the minor, a changed meaning the major.
"""
