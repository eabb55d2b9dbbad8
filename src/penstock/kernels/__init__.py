"""Operations on tensors, each with a plain torch reference behind one signature."""
