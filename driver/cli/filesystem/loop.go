package filesystem

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"drover.io/drover/api"
)

// loopPartition makes a loop device of a partition of a device, because the kernel does not look for partitions on
// every device. The loop device ends with its last mount, or with endLoops.
func loopPartition(ctx context.Context, device string, number int) (loop string, err error) {
	out, err := runTool(ctx, "partx", "--raw", "--noheadings", "--output", "NR,START,SECTORS", device)
	if err != nil {
		return "", fmt.Errorf("%s has no partitions: %w", device, err)
	}
	var known []string
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) != 3 {
			continue
		}
		known = append(known, f[0])
		if f[0] != strconv.Itoa(number) {
			continue
		}
		start, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil {
			return "", fmt.Errorf("partx of %s: %w", device, err)
		}
		count, err := strconv.ParseInt(f[2], 10, 64)
		if err != nil {
			return "", fmt.Errorf("partx of %s: %w", device, err)
		}
		out, err := runTool(ctx, "losetup", "--find", "--show", "--offset", fmt.Sprint(start*512), "--sizelimit",
			fmt.Sprint(count*512), device)
		return strings.TrimSpace(out), err
	}
	return "", api.Errorf(api.NotFound, "%s has no partition %d: the partitions are %s", device, number,
		strings.Join(known, ", "))
}

// endLoops ends loop devices, at once or with their last mount.
func endLoops(ctx context.Context, loops []string) error {
	if len(loops) == 0 {
		return nil
	}
	_, err := runTool(ctx, "losetup", append([]string{"--detach"}, loops...)...)
	return err
}

// loopsOn returns the loop devices that were made on devices.
func loopsOn(devices []string) []string {
	return loopsWhere(func(file string) bool { return slices.Contains(devices, file) })
}

// lostDevices returns the loop devices of this machine on a volume's file, by the data process's name of the file:
// drover-UID.MARK, without the mark from older versions. Beside the attachment's device, lostDevices returns devices
// that lost all processes of Drover: such devices may still be mounted, and only return errors.
func lostDevices(volume api.UID) []string {
	return loopsWhere(func(file string) bool {
		name, _, _ := strings.Cut(filepath.Base(file), ".")
		return volume != "" && name == "drover-"+string(volume)
	})
}

// loopsWhere returns the loop devices of this machine whose file matches.
func loopsWhere(match func(file string) bool) []string {
	var out []string
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if on, err := os.ReadFile(f); err == nil && match(strings.TrimSpace(string(on))) {
			out = append(out, "/dev/"+strings.Split(f, "/")[3])
		}
	}
	return out
}
