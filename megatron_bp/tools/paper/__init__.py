"""The paper's tables: counted, fitted on one model, predicted for all others."""
