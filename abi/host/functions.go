package host

// envFunctions are all functions in the module env, of every version of the
// ABI; a guest does not import a function that its version lacks. Each one
// receives its parameters as the engine passes them: the upper half of an i32
// is undefined. It returns a Status. Before it has any effect, it checks that
// the memory that it reads and will write lies inside guest memory.
var envFunctions = map[string]hostFunction{
	"proxy_log":                          {params: "iii", until: allocating, call: log},
	"proxy_get_log_level":                {params: "i", call: getLogLevel},
	"proxy_get_current_time_nanoseconds": {params: "i", call: getCurrentTime},
	"proxy_set_tick_period_milliseconds": {params: "i", call: setTickPeriod},
	"proxy_set_effective_context":        {params: "i", call: setEffectiveContext},
	"proxy_done":                         {params: "", call: done},
	"proxy_get_configuration":            {params: "ii", call: getConfiguration},
	"proxy_get_buffer_bytes":             {params: "iiiii", call: getBufferBytes},
	"proxy_set_buffer_bytes":             {params: "iiiii", call: setBufferBytes},
	"proxy_get_buffer_status":            {params: "iii", call: getBufferStatus},
	"proxy_get_header_map_size":          {params: "ii", call: getHeaderMapSize},
	"proxy_get_header_map_pairs":         {params: "iii", call: getHeaderMapPairs},
	"proxy_set_header_map_pairs":         {params: "iii", call: setHeaderMapPairs},
	"proxy_get_header_map_value":         {params: "iiiii", call: getHeaderMapValue},
	"proxy_add_header_map_value":         {params: "iiiii", call: addHeaderMapValue},
	"proxy_replace_header_map_value":     {params: "iiiii", call: replaceHeaderMapValue},
	"proxy_remove_header_map_value":      {params: "iii", call: removeHeaderMapValue},
	"proxy_continue_request":             {params: "", call: continueRequest},
	"proxy_continue_response":            {params: "", call: continueResponse},
	"proxy_clear_route_cache":            {params: "", call: clearRouteCache},
	"proxy_continue_stream":              {params: "i", call: continueStream},
	"proxy_close_stream":                 {params: "i", call: closeStream},
	"proxy_send_local_response":          {params: "iiiiiiii", call: sendLocalResponse},
	"proxy_http_call":                    {params: "iiiiiiiiii", call: httpCall},
	"proxy_get_status":                   {params: "iii", call: getStatus},
	"proxy_grpc_call":                    {params: "iiiiiiiiiiii", call: grpcCall},
	"proxy_grpc_stream":                  {params: "iiiiiiiii", call: grpcStream},
	"proxy_grpc_send":                    {params: "iiii", call: grpcSend},
	"proxy_grpc_cancel":                  {params: "i", call: grpcEnd},
	"proxy_grpc_close":                   {params: "i", call: grpcEnd},
	"proxy_set_shared_data":              {params: "iiiii", call: setSharedData},
	"proxy_get_shared_data":              {params: "iiiii", call: getSharedData},
	"proxy_register_shared_queue":        {params: "iii", call: registerSharedQueue},
	"proxy_resolve_shared_queue":         {params: "iiiii", call: resolveSharedQueue},
	"proxy_enqueue_shared_queue":         {params: "iii", call: enqueueSharedQueue},
	"proxy_dequeue_shared_queue":         {params: "iii", call: dequeueSharedQueue},
	"proxy_define_metric":                {params: "iiii", call: defineMetric},
	"proxy_record_metric":                {params: "iI", call: recordMetric},
	"proxy_increment_metric":             {params: "iI", call: incrementMetric},
	"proxy_get_metric":                   {params: "ii", call: getMetric},
	"proxy_get_property":                 {params: "iiii", call: getProperty},
	"proxy_set_property":                 {params: "iiii", call: setProperty},
	"proxy_call_foreign_function":        {params: "iiiiii", call: callForeignFunction},
	"emscripten_notify_memory_growth":    {params: "i", void: true, until: allocating, call: notifyMemoryGrowth},
	"pthread_equal":                      {params: "ii", until: allocating, call: pthreadEqual},
}

// notifyMemoryGrowth implements emscripten_notify_memory_growth. It does
// nothing, because the host never keeps views of guest memory.
func notifyMemoryGrowth(*VM, []uint64) Status { return OK }

// pthreadEqual implements pthread_equal of the C library.
func pthreadEqual(_ *VM, args []uint64) Status {
	if uint32(args[0]) == uint32(args[1]) {
		return 1
	}
	return 0
}
