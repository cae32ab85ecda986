"""An endpoint that answers in simulated time: OpenAI's interface in front of the engine, paced by the wall clock."""
