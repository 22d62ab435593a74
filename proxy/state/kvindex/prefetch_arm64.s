#include "textflag.h"

// func prefetch(at *lines, n int)
TEXT ·prefetch(SB), NOSPLIT, $0-16
	MOVD at+0(FP), R0
	MOVD n+8(FP), R1

next:
	CBZ    R1, done
	MOVD.P 8(R0), R2
	PRFM   (R2), PLDL1KEEP
	SUB    $1, R1, R1
	B      next

done:
	RET
