package host

import "strings"

// headerMap returns a map. NotFound: the map is not available now. BadArgument:
// the kind of map is unknown.
func (vm *VM) headerMap(kind MapKind) (HeaderMap, Status) {
	switch kind {
	case HTTPRequestHeaders, HTTPRequestTrailers, HTTPResponseHeaders, HTTPResponseTrailers:
		if stream := vm.stream(); stream != nil {
			if m := stream.Header(kind); m != nil {
				return m, OK
			}
		}
	case HTTPCallResponseHeaders:
		if vm.answer != nil {
			return vm.answer.headers, OK
		}
	case HTTPCallResponseTrailers:
		if vm.answer != nil {
			return vm.answer.trailers, OK
		}
	case GRPCCallInitialMetadata, GRPCCallTrailingMetadata:
		// This host has no gRPC calls, so their maps never exist.
	default:
		return nil, BadArgument
	}
	return nil, NotFound
}

// changeable returns a map for a change. BadArgument: the kind of map is
// unknown, or the map is not available now.
func (vm *VM) changeable(kind uint64) (HeaderMap, Status) {
	m, status := vm.headerMap(MapKind(uint32(kind)))
	if status != OK {
		return nil, BadArgument
	}
	return m, OK
}

// getHeaderMapSize implements proxy_get_header_map_size: it returns the size of
// the serialized map in bytes, as Envoy does.
func getHeaderMapSize(vm *VM, args []uint64) Status {
	m, status := vm.headerMap(MapKind(uint32(args[0])))
	if status != OK {
		return status
	}
	return vm.writeU32(args[1], uint32(m.Pairs().EncodedSize()))
}

// getHeaderMapPairs implements proxy_get_header_map_pairs. An empty map gives
// address 0 and size 0.
func getHeaderMapPairs(vm *VM, args []uint64) Status {
	m, status := vm.headerMap(MapKind(uint32(args[0])))
	if status != OK {
		return status
	}
	pairs := m.Pairs()
	view, status := vm.reserve(args[1], args[2], uint64(pairs.EncodedSize()))
	if status == OK {
		pairs.Append(view[:0])
	}
	return status
}

// setHeaderMapPairs implements proxy_set_header_map_pairs.
func setHeaderMapPairs(vm *VM, args []uint64) Status {
	m, status := vm.changeable(args[0])
	if status != OK {
		return status
	}
	pairs, status := vm.readPairs(args[1], args[2])
	if status != OK {
		return status
	}
	return m.SetPairs(pairs)
}

// getHeaderMapValue implements proxy_get_header_map_value. NotFound: there is
// no such key; a 0.1.0 guest gets OK and an empty value instead.
func getHeaderMapValue(vm *VM, args []uint64) Status {
	m, status := vm.headerMap(MapKind(uint32(args[0])))
	if status != OK {
		return status
	}
	key, ok := vm.read(args[1], args[2])
	if !ok || !vm.inside(args[3], args[4]) {
		return InvalidMemoryAccess
	}
	value, ok := "", len(key) <= MaxPairsBytes
	if ok {
		value, ok = m.Value(string(key))
	}
	if !ok && !vm.module.v010 {
		return NotFound
	}
	return vm.writeString(args[3], args[4], value)
}

// addHeaderMapValue implements proxy_add_header_map_value.
func addHeaderMapValue(vm *VM, args []uint64) Status {
	return changeValue(vm, args, HeaderMap.Add)
}

// replaceHeaderMapValue implements proxy_replace_header_map_value.
func replaceHeaderMapValue(vm *VM, args []uint64) Status {
	return changeValue(vm, args, HeaderMap.Replace)
}

// changeValue reads a map, a key and a value, and applies the change.
// InternalFailure: key and value together are longer than a map may be.
func changeValue(vm *VM, args []uint64, change func(m HeaderMap, key, value string) Status) Status {
	m, status := vm.changeable(args[0])
	if status != OK {
		return status
	}
	key, value, ok := vm.readTwo(args[1:])
	if !ok {
		return InvalidMemoryAccess
	}
	if len(key)+len(value) > MaxPairsBytes {
		return InternalFailure
	}
	return change(m, string(key), string(value))
}

// removeHeaderMapValue implements proxy_remove_header_map_value. Removing an
// absent key is OK.
func removeHeaderMapValue(vm *VM, args []uint64) Status {
	m, status := vm.changeable(args[0])
	if status != OK {
		return status
	}
	key, ok := vm.read(args[1], args[2])
	if !ok {
		return InvalidMemoryAccess
	}
	if len(key) > MaxPairsBytes {
		return OK
	}
	return m.Remove(string(key))
}

// readOnlyMap is the header map of an HTTP call's answer.
type readOnlyMap struct{ pairs Pairs }

// Pairs implements HeaderMap.
func (m readOnlyMap) Pairs() Pairs { return m.pairs }

// Value implements HeaderMap.
func (m readOnlyMap) Value(key string) (value string, ok bool) {
	for _, pair := range m.pairs {
		if strings.EqualFold(pair.Key, key) {
			return pair.Value, true
		}
	}
	return "", false
}

// SetPairs implements HeaderMap. The map is read-only.
func (readOnlyMap) SetPairs(Pairs) Status { return BadArgument }

// Add implements HeaderMap. The map is read-only.
func (readOnlyMap) Add(string, string) Status { return BadArgument }

// Replace implements HeaderMap. The map is read-only.
func (readOnlyMap) Replace(string, string) Status { return BadArgument }

// Remove implements HeaderMap. The map is read-only.
func (readOnlyMap) Remove(string) Status { return BadArgument }
