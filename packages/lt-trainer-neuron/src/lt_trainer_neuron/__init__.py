"""AWS Trainium (neuronx-distributed) engine of lt; its specification is `lt_trainer_neuron.spec.SPEC`."""
