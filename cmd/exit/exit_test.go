package exit

import (
	"errors"
	"fmt"
	"testing"
)

func TestFailed(t *testing.T) {
	if err := Failed(nil); err != nil {
		t.Errorf("Failed(nil) = %v, want nil", err)
	}
	cause := errors.New("away")
	var e *Error
	if err := fmt.Errorf("run: %w", Failed(cause)); !errors.As(err, &e) || e.Code != Failure || !errors.Is(err, cause) || e.Error() != "away" {
		t.Errorf("%+v", e)
	}
}
