"""Random programs of what user code does around a module call, run under DDP and the stages."""
