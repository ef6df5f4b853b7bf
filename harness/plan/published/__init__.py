"""Published planners behind the interface of ours: FlexFlow (2018) and PipeDream."""
