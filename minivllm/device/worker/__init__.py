"""The device's room: StepPlan -> StepResult.  torch, and no policy: it does what a plan says.

process ──► runner ──► state        the columns of rows that run
               ├─────► step         what a step does; sampling, scoring
               ├─────► calls        of processors and sampler, each over its rows
               ├─────► graphs ──► captured, capture
               └─────► drafting ──► own_model
"""
