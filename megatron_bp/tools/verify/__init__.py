"""The certificate that a layout trains the same model: real steps of a config under each topology.

Every layout starts from one set of weights, reads the same samples and is compared with a reference
layout: loss, gradient norm, and the gradient of every parameter by name. docs/verify.md explains.

    topology      "tp=2,bp=2,pp=2" to degrees        gradients  a rank's share, saved by full names
    configuration the user's config, of one layout   stored     full tensors, one at a time
    shrink        --tiny                             compare    what is equal, and how nearly
    sample_data   text for --tiny, if there is none  report     the table and the JSON
    sample_chats  chats for --tiny, of such text
    launch        processes, timeouts, logs          run        the order of the steps
    worker        one rank of one layout             command    the command line
    observe       what a rank notes while it trains
"""
