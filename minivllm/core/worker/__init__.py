"""The device's room: StepPlan -> StepResult.  torch, and no policy: it does what a plan says.

process ──► runner ──► state        the columns of rows that run
               ├─────► graphs ──► capture
               ├─────► sampling, scoring
               └─────► drafting ──► own_model
"""
