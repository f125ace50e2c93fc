"""Every private torch name that the user-facing layer touches, with the reason.

The runtime and the passes each have a file of this name for what they lean on, since imports
point downwards only.
"""
