package host

// envFunctions is everything in the module env, for every version of the ABI:
// a function that a version does not have is simply not imported.
var envFunctions = map[string]hostFunction{}
