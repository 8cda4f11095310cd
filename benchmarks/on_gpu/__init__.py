"""The parts of ``scripts/bench gpu``, each of which runs on a GPU or is compiled for one that is not here."""
