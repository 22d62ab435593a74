package host

// defineMetric implements proxy_define_metric. BadArgument: the type is
// unknown, or the name is longer than MaxMetricName bytes.
func defineMetric(vm *VM, args []uint64) Status {
	kind := MetricKind(uint32(args[0]))
	if kind > Histogram {
		return BadArgument
	}
	name, ok := vm.read(args[1], args[2])
	if !ok || !vm.inside(args[3]) {
		return InvalidMemoryAccess
	}
	if len(name) > MaxMetricName {
		return BadArgument
	}
	id, status := vm.env.DefineMetric(kind, string(name))
	if status != OK {
		return status
	}
	return vm.writeU32(args[3], id)
}

// recordMetric implements proxy_record_metric. NotFound: no such metric.
func recordMetric(vm *VM, args []uint64) Status {
	return vm.env.RecordMetric(uint32(args[0]), args[1])
}

// incrementMetric implements proxy_increment_metric. NotFound: no such metric.
// BadArgument: a metric of its type cannot change by that amount.
func incrementMetric(vm *VM, args []uint64) Status {
	return vm.env.IncrementMetric(uint32(args[0]), int64(args[1]))
}

// getMetric implements proxy_get_metric. NotFound: no such metric.
func getMetric(vm *VM, args []uint64) Status {
	if _, ok := vm.read(args[1], 8); !ok {
		return InvalidMemoryAccess
	}
	value, status := vm.env.Metric(uint32(args[0]))
	if status != OK {
		return status
	}
	return vm.writeU64(args[1], value)
}
