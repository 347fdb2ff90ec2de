"""Contracts of the plug-ins, which this project calls seams.

Each file defines one seam: the base class that a plug-in implements, the rules of its methods, and a small frozen
context object that the plug-in receives when it is constructed.  Importing this package imports numpy, but not torch.

``API`` in each file is the (major, minor) version of the contract.  A new optional method, context field or feature
raises the minor version.  A changed meaning raises the major version.
"""
