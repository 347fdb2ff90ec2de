"""A template of a back end for an accelerator.  This module imports nothing, so that reading a spec costs nothing."""
