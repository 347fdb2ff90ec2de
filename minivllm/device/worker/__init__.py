"""Run the steps of an engine on one device: StepPlan -> StepResult.

The code here uses torch and makes no scheduling decisions; the plan of a step contains all of them.

process ──► runner ──► state        tensors with a value for each running row
               ├─────► step         the operations of a step; sampling, scoring
               ├─────► calls        calls of processors and sampler
               ├─────► graphs ──► captured, capture
               └─────► drafting ──► own_model
"""
