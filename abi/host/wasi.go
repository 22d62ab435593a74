package host

var wasiFunctions = map[string]hostFunction{}

var unstableFunctions = map[string]hostFunction{}
