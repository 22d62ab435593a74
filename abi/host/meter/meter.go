package meter

// ImportModule is the name of the module from which a metered module imports its checks. No
// module may import from it before.
const ImportModule = "pdproxy_meter"
