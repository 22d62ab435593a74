package meter

import "math"

// bodies returns the metered bodies of all functions and of the helpers.
func (w *rewriter) bodies() [][]byte {
	list := make([][]byte, 0, len(w.Functions)+len(w.helpers))
	var code []byte
	for i := range w.Functions {
		code = w.body(code[:0], &w.Functions[i])
		list = append(list, append(appendUint(make([]byte, 0, len(code)+5), len(code)), code...))
	}
	for _, h := range w.helpers {
		list = append(list, append(appendUint(nil, len(h.code)), h.code...))
	}
	return list
}

// body appends the metered code of a function to out.
func (w *rewriter) body(out []byte, f *Function) []byte {
	w.weigh(f, &w.meter)
	out = append(out, f.code[:f.body]...)
	out = w.check(out, w.meter.weights[0])
	loops := 0
	from := f.body
	r := &reader{data: f.code, pos: f.body}
	for r.more() {
		at := r.pos
		in := w.instruction(r)
		switch {
		case in.op == opLoop:
			loops++
			out = w.check(append(out, f.code[from:r.pos]...), w.meter.weights[loops])
		case in.op == opCall, in.op == opRefFunc:
			out = appendUint(append(append(out, f.code[from:at]...), in.op), w.shift(in.index))
		case in.op == prefixMisc && in.misc > 0x07:
			out = w.misc(append(out, f.code[from:at]...), f.code[at:r.pos], in)
		default:
			continue
		}
		from = r.pos
	}
	return append(out, f.code[from:]...)
}

// misc appends an instruction after prefixMisc, whose operand on top of the stack is a length, or
// a helper in its place.
func (w *rewriter) misc(out, code []byte, in instruction) []byte {
	switch usesOf(in.misc) {
	case usesFill:
		return appendUint(append(out, opCall), w.fill)
	case usesCopy:
		return appendUint(append(out, opCall), w.copy)
	case usesCharge:
		out = appendUint(append(out, opCall), w.charge)
	case usesGrow:
		limit := uint32(math.MaxUint32)
		if t := w.Tables[in.index]; t.HasMax {
			limit = t.Max
		}
		out = appendUint(append(out, prefixMisc, miscTableSize), int(in.index))
		out = appendUint(append(appendConst(out, int32(limit)), opCall), w.Imports+1)
	}
	return append(out, code...)
}

// check appends the check at the beginning of a function or loop.
func (w *rewriter) check(out []byte, weight int) []byte {
	if weight == 0 {
		return out
	}
	return w.spend(out, appendConst(nil, int32(weight)))
}

// spend appends a check that subtracts the value of an expression.
func (w *rewriter) spend(out, weight []byte) []byte {
	out = appendUint(append(out, opGlobalGet), w.budget)
	out = append(append(out, weight...), opI32Sub)
	out = appendUint(append(out, opGlobalSet), w.budget)
	out = appendUint(append(out, opGlobalGet), w.budget)
	out = append(out, opI32Const, 0, opI32LtS, opIf, typeEmpty)
	out = appendUint(append(out, opCall), w.Imports)
	out = appendUint(append(out, opGlobalSet), w.budget)
	return append(out, opEnd)
}

// addHelpers adds the helpers that the module's functions need.
func (w *rewriter) addHelpers() {
	var need uses
	for i := range w.Functions {
		need |= w.Functions[i].bulk
	}
	add := func(use uses, index *int, h helper) {
		if need&use != 0 {
			*index = w.Imports + imports + len(w.Functions) + len(w.helpers)
			w.helpers = append(w.helpers, h)
		}
	}
	add(usesFill, &w.fill, helper{"memory.fill", kindBulk, w.bulk([]byte{prefixMisc, miscMemoryFill, 0}, nil)})
	add(usesCopy, &w.copy, helper{"memory.copy", kindBulk, w.bulk([]byte{prefixMisc, miscMemoryCopy, 0, 0}, []byte{1})})
	add(usesCharge, &w.charge, helper{"charge", kindCharge, w.chargeCode()})
}

// chargeCode is the code of a helper that spends half of its parameter and returns the parameter.
func (w *rewriter) chargeCode() []byte {
	out := w.spend([]byte{0}, []byte{opLocalGet, 0, opI32Const, 1, opI32ShrU})
	return append(out, opLocalGet, 0, opEnd)
}

// bulk is the code of a helper that executes an instruction with the parameters address, value
// and length in pieces. sources are the other parameters that are addresses. An instruction whose
// addresses are outside of the memory fails before it writes anything, so the helper executes it
// at once.
func (w *rewriter) bulk(instruction, sources []byte) []byte {
	const target, value, length = 0, 1, 2
	out := []byte{0, opBlock, typeEmpty} // no locals
	out = append(appendConst(append(out, opLocalGet, length), chunk), opI32LeU, opBrIf, 0)
	for _, address := range append([]byte{target}, sources...) {
		// unless address + length <= memory.size * 64 KiB
		out = append(out, opLocalGet, address, opI64ExtendU, opLocalGet, length, opI64ExtendU, opI64Add,
			opMemorySize, 0, opI64ExtendU, opI64Const, 16, opI64Shl, opI64LeU, opI32Eqz, opBrIf, 0)
	}
	if len(sources) > 0 {
		// From the end, when the target may cover the rest of the source.
		out = append(out, opLocalGet, target, opLocalGet, value, opI32GtU, opIf, typeEmpty)
		out = append(out, opLoop, typeEmpty)
		out = w.shorten(out, length)
		for _, address := range []byte{target, value} {
			out = append(out, opLocalGet, address, opLocalGet, length, opI32Add)
		}
		out = append(appendConst(out, chunk), instruction...)
		out = w.again(out, length)
		out = append(out, opBr, 1, opEnd)
	}
	out = append(out, opLoop, typeEmpty)
	out = append(appendConst(append(out, opLocalGet, target, opLocalGet, value), chunk), instruction...)
	for _, address := range append([]byte{target}, sources...) {
		out = append(appendConst(append(out, opLocalGet, address), chunk), opI32Add, opLocalSet, address)
	}
	out = w.shorten(out, length)
	out = w.again(out, length)
	out = append(out, opEnd)
	out = w.spend(out, []byte{opLocalGet, length, opI32Const, weightShift, opI32ShrU})
	out = append(out, opLocalGet, target, opLocalGet, value, opLocalGet, length)
	return append(append(out, instruction...), opEnd)
}

// shorten appends length = length - chunk.
func (w *rewriter) shorten(out []byte, length byte) []byte {
	return append(appendConst(append(out, opLocalGet, length), chunk), opI32Sub, opLocalSet, length)
}

// again appends the check of a loop over pieces, and its end.
func (w *rewriter) again(out []byte, length byte) []byte {
	out = w.check(out, chunk>>weightShift)
	return append(appendConst(append(out, opLocalGet, length), chunk), opI32GtU, opBrIf, 0, opEnd)
}
