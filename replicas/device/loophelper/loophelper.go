// Package loophelper performs the operations on a loop device that may wait for the device's I/O: setting up, opening
// while another program closes the device and writes dirty pages, flushing, freezing the queue, closing. Each
// operation runs in a helper process, which is this program again. A thread of the data process could not end while
// waiting in the kernel for an answer that only the data process can give: a killed process would keep its files, and
// no successor could take over.
//
// A helper outlives the process that started the helper, and ends with the I/O that the helper waits for. A helper
// inherits no file but the two for a set-up.
//
// Goroutines: one for each helper, which ends with the helper.
package loophelper

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"drover.io/drover/api"
)

// Operations that the environment of a helper names, as "deed n file".
const (
	variable = "DROVER_LOOP_HELPER"

	deedClaim = "claim" // check that no program has mounted or claimed the device
	deedGrow  = "grow"
	deedClear = "clear" // claim, flush, and on demand take the device off the file
	deedSetUp = "setup" // put a free loop device on a file

	flushed = "flushed" // the helper's word for a good flush; else a cause
)

// A helper's findings, which are exit codes too.
var (
	ErrGone    = errors.New("the loop device is another one's")
	ErrClaimed = errors.New("the loop device is mounted, or open exclusively")
	ErrOpen    = errors.New("the loop device is open in some process")
)

var exits = map[int]error{10: ErrGone, 11: ErrClaimed, 12: ErrOpen}

// Kinds of errors are exit codes, too.
var kinds = map[int]api.Kind{20: api.Unsupported, 21: api.Busy}

// init is the whole life of a helper: init must work in every program that serves devices, tests too.
func init() {
	asked := os.Getenv(variable)
	if asked == "" {
		return
	}
	work := helperMain
	if strings.HasPrefix(asked, deedSetUp+" ") {
		work = setUp
	}
	err := work(asked)
	for code, is := range exits {
		if errors.Is(err, is) {
			os.Exit(code)
		}
	}
	for code, kind := range kinds {
		if api.Is(err, kind) {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(code)
		}
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", variable, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Claim checks that the loop device still stands on file and that no program has mounted the device.
func Claim(ctx context.Context, n int, file string) error { return runHelper(ctx, deedClaim, n, file) }

// Grow makes the loop device as large as the file.
func Grow(ctx context.Context, n int, file string) error { return runHelper(ctx, deedGrow, n, file) }

func runHelper(ctx context.Context, deed string, n int, file string) error {
	h, err := startHelper(deed, n, file)
	if err != nil {
		return err
	}
	defer h.GiveUp()
	return h.Wait(ctx)
}

// Helper is a process that works on a loop device.
type Helper struct {
	tell    *os.File
	flushed chan error
	ended   chan error
}

// Clear begins to take a loop device off the file: from now on no other program can mount the device, and the helper
// flushes the device. Finish or GiveUp must follow.
func Clear(n int, file string) (*Helper, error) { return startHelper(deedClear, n, file) }

func startHelper(deed string, n int, file string) (*Helper, error) {
	in, tell, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("helper for a loop device: %w", err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %s", variable, deed, n, file))
	cmd.Stdin = in
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	_ = in.Close()
	if err != nil {
		_ = tell.Close()
		return nil, fmt.Errorf("helper for a loop device: %w", err)
	}
	h := &Helper{tell: tell, flushed: make(chan error, 1), ended: make(chan error, 1)}
	go func() {
		for sc := bufio.NewScanner(out); sc.Scan(); {
			if line := sc.Text(); line == flushed {
				h.flushed <- nil
			} else {
				h.flushed <- errors.New(line)
			}
		}
		h.ended <- helperError(cmd.Wait(), said.String())
	}()
	return h, nil
}

func helperError(err error, said string) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if is := exits[exit.ExitCode()]; is != nil {
			return is
		}
		if kind, is := kinds[exit.ExitCode()]; is {
			return api.Errorf(kind, "%s", strings.TrimSpace(said))
		}
	}
	if err != nil {
		return fmt.Errorf("helper for a loop device: %w: %s", err, strings.TrimSpace(said))
	}
	return nil
}

// Flushed waits for the flush: flush is the flush's error, err says why there was no flush.
func (h *Helper) Flushed(ctx context.Context) (flush, err error) {
	select {
	case flush = <-h.flushed:
		return flush, nil
	case err := <-h.ended:
		h.ended <- err
		select {
		case flush = <-h.flushed: // said before
			return flush, nil
		default:
			return nil, err
		}
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Finish takes the device off the file and waits for the end, or fails since another program has the device open.
func (h *Helper) Finish(ctx context.Context) error {
	if _, err := h.tell.WriteString("clear\n"); err != nil {
		return fmt.Errorf("helper for a loop device: %w", err)
	}
	return h.Wait(ctx)
}

// GiveUp ends a helper without Finish.
func (h *Helper) GiveUp() { _ = h.tell.Close() }

// Wait waits for the helper's end, and returns the helper's error.
func (h *Helper) Wait(ctx context.Context) error {
	select {
	case err := <-h.ended:
		h.ended <- err
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
