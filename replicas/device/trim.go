package device

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"

	"drover.io/drover/api"
)

//go:embed trim.sh
var trimScript string

// trimmed matches fstrim's output: "/mnt: 1.2 GiB (1288490188 bytes) trimmed".
var trimmed = regexp.MustCompile(`\((\d+) bytes\) trimmed`)

// trimEnds is how long an abandoned trim may take to end.
const trimEnds = 10 * time.Second

// Trim has the file system of a device that is mounted here discard its unused blocks, and returns the number of
// bytes. As for a freeze, a process of its own trims: a trim waits for I/O that the data process serves.
func (d *Device) Trim(ctx context.Context) (int64, error) {
	mounts, err := mountsOn(d.dev)
	if err != nil {
		return 0, err
	}
	if loopFile(d.dev) != d.file { // the number can be another device's by now
		mounts = nil
	}
	var said bytes.Buffer
	for _, m := range mounts { // all of one file system
		said.Reset()
		cmd := exec.CommandContext(ctx, "sh", "-c", trimScript, "trim", m.Mountpoint, strconv.Itoa(m.ID))
		cmd.Env = append(os.Environ(), "LC_ALL=C")
		cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &said, &said, trimEnds
		if err = cmd.Run(); err == nil {
			if is := trimmed.FindStringSubmatch(said.String()); is != nil {
				return strconv.ParseInt(is[1], 10, 64)
			}
			return 0, fmt.Errorf("trim %s at %s: fstrim said %q", d.Path(), m.Mountpoint, said.String())
		}
		if c := exitCode(err); c != exitNotMount && c != exitNoFolder {
			return 0, fmt.Errorf("trim %s at %s: %w: %s", d.Path(), m.Mountpoint, err, strings.TrimSpace(said.String()))
		}
	}
	return 0, api.Errorf(api.Unsupported, "%s is not mounted on this node: the user of a raw block volume trims the "+
		"volume", d.Path())
}
