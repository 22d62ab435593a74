package host

// readOnlyMap is the map of a received answer.
type readOnlyMap struct{ pairs Pairs }
