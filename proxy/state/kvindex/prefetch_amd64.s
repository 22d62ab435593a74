#include "textflag.h"

// func prefetch(at *lines, n int)
TEXT ·prefetch(SB), NOSPLIT, $0-16
	MOVQ at+0(FP), AX
	MOVQ n+8(FP), BX
	XORQ CX, CX

next:
	CMPQ       CX, BX
	JGE        done
	MOVQ       (AX)(CX*8), DX
	PREFETCHT0 (DX)
	INCQ       CX
	JMP        next

done:
	RET
