package node

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/mount-utils"
	utilexec "k8s.io/utils/exec"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// filesystem describes how to mount, check and grow one type of file system; api.MkfsCommand makes a file system.
type filesystem struct {
	options []string // of every mount
	// whole is a check that changes nothing and ends well only for a complete file system.
	whole []string
	// slack is by how much a file system that fills its device may be smaller, in bytes.
	slack int64
}

var filesystems = map[string]filesystem{
	"ext4": {whole: []string{"e2fsck", "-fn"}, slack: 4 << 20},
	// Volumes of one image share one UUID, and xfs would refuse to mount the second.
	"xfs":   {options: []string{"nouuid"}, whole: []string{"xfs_repair", "-n"}, slack: 1 << 20},
	"btrfs": {whole: []string{"btrfs", "check", "--readonly"}, slack: 1 << 20},
}

const defaultFS = "ext4"

// detectContent names the content of a device: a file system's type, "" for nothing that blkid knows.
func detectContent(d device) (string, error) {
	fs, err := mount.NewSafeFormatAndMount(mount.NewWithoutSystemd(""), utilexec.New()).GetDiskFormat(d.path)
	if err != nil {
		return "", api.Errorf(api.Unavailable, "content of %s is unknown (blkid): %w", d.path, err)
	}
	return fs, nil
}

// runProgram runs a program to its end, even after the caller's deadline: a half-made or half-grown file system helps
// no caller.
func runProgram(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(context.WithoutCancel(ctx), args[0], args[1:]...).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return api.Errorf(api.Unavailable, "%s is not installed on this node", args[0])
	}
	if err != nil {
		return &failure{name: args[0], err: err, out: strings.Join(strings.Fields(string(out)), " ")}
	}
	return nil
}

// failure is a failed program, with the program's output.
type failure struct {
	name string
	err  error
	out  string
}

func (f *failure) Error() string {
	out := f.out
	if len(out) > 600 {
		out = "..." + out[len(out)-600:]
	}
	return f.name + ": " + f.err.Error() + ": " + out
}

func (f *failure) Unwrap() error { return f.err }

// failedWith reports whether a program failed with the given words.
func failedWith(err error, words string) bool {
	var f *failure
	return errors.As(err, &f) && strings.Contains(strings.ToLower(f.out), strings.ToLower(words))
}

// ensureFilesystem returns the type of the file system on the device, and makes a file system only if that is safe.
// An empty wanted accepts any type, and makes the default.
func (s *Server) ensureFilesystem(ctx context.Context, vol *api.Volume, att *api.Attachment, d device, wanted string,
	readOnly bool) (string, error) {
	begun, had := vol.Annotations[api.AnnotationMkfs], vol.Annotations[api.AnnotationFS]
	found, err := detectContent(d)
	if err != nil {
		return "", err
	}
	if found != "" && begun == "" {
		return found, checkMountable(vol.Name, found, wanted)
	}
	made := wanted
	if made == "" {
		made = defaultFS
	}
	switch {
	case readOnly:
		return "", api.Errorf(api.InUse, "volume %s has no file system and is attached read-only: write to it first",
			vol.Name)
	case begun != "" && found != "" && found != begun:
		return "", api.Errorf(api.InUse, "volume %s: a %s was being made on it, but it holds %s: it is not formatted",
			vol.Name, begun, found)
	case begun != "" && found == made && runProgram(ctx, append(slices.Clone(filesystems[made].whole), d.path)...) == nil:
		return made, s.recordFilesystem(ctx, vol, "", made) // the file system was finished, only the mark was missing
	case begun != "":
	case had != "":
		return "", api.Errorf(api.Corrupt, "volume %s had a %s file system, which blkid does not recognise any more: "+
			"Drover does not format the volume again; repair the file system, or restore the volume", vol.Name, had)
	default:
		if err := proveBlank(vol, att, d); err != nil {
			return "", err
		}
	}
	return made, s.makeFilesystem(ctx, vol, d, made)
}

// checkMountable refuses a file system that cannot be mounted, or that is not the requested type.
func checkMountable(name, found, wanted string) error {
	_, known := filesystems[found]
	switch {
	case wanted != "" && wanted != found:
		return api.Errorf(api.InUse, "volume %s holds %s, but %s is asked for: it is not formatted over data", name,
			found, wanted)
	case !known && found != "ext2" && found != "ext3":
		return api.Errorf(api.InUse, "volume %s holds %s, which cannot be mounted: use it as a block device", name,
			found)
	}
	return nil
}

// proveBlank proves that the device was never written. The map proved so when the device was made; since then only this
// door's mounts, which need a file system, may have used the device. The samples catch writes past all doors.
func proveBlank(vol *api.Volume, att *api.Attachment, d device) error {
	if att.Status.Blank && att.Annotations[api.AnnotationDoor] != "csi" {
		return api.Errorf(api.InUse, "volume %s was attached by hand, so that it may have been written to since: detach "+
			"it and publish it again, then a file system can be made", vol.Name)
	}
	clean := att.Status.Blank && att.Annotations[api.AnnotationRaw] == ""
	if clean {
		var err error
		if clean, err = d.looksBlank(); err != nil {
			return err
		}
	}
	if !clean {
		return api.Errorf(api.InUse, "volume %s holds data without a known file system: Drover does not format it; use "+
			"the volume as a block device", vol.Name)
	}
	return nil
}

func (s *Server) makeFilesystem(ctx context.Context, vol *api.Volume, d device, fs string) error {
	if err := s.recordFilesystem(ctx, vol, fs, ""); err != nil {
		return err
	}
	args := slices.Concat(api.MkfsCommand(fs), strings.Fields(vol.Spec.MkfsParams))
	if err := runProgram(ctx, append(args, d.path)...); err != nil {
		kind := api.KindOf(err)
		if kind == api.Other {
			kind = api.Invalid // of the options or the size: the same call will fail again
		}
		return api.Errorf(kind, "make a %s file system on volume %s: %w", fs, vol.Name, err)
	}
	slog.InfoContext(ctx, "file system made", "volume", vol.Name, "type", fs, "device", d.path)
	return s.recordFilesystem(ctx, vol, "", fs)
}

// recordFilesystem records on the Volume, durably, which file system is being made, and which was made.
// recordFilesystem continues after the caller's deadline, since the recorded step has happened.
func (s *Server) recordFilesystem(ctx context.Context, vol *api.Volume, making, made string) error {
	or := func(v string) any {
		if v == "" {
			return nil // a null removes the annotation
		}
		return v
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": vol.UID,
		"annotations": map[string]any{api.AnnotationMkfs: or(making), api.AnnotationFS: or(made)}}})
	if err == nil {
		err = s.client.Patch(context.WithoutCancel(ctx), vol, client.RawPatch(types.MergePatchType, patch))
	}
	return api.Explain(err, "record the making of a file system on volume %s", vol.Name)
}

// sizeOf reads the size of a file system from the super block, in bytes; 0: not known.
func sizeOf(d device, fs string) (int64, error) {
	f, err := os.Open(d.path)
	if err != nil {
		return 0, api.Errorf(api.Unavailable, "read the file system on %s: %w", d.path, err)
	}
	defer f.Close()
	at := func(off int64, n int) []byte {
		b := make([]byte, n)
		if err == nil {
			_, err = io.ReadFull(io.NewSectionReader(f, off, int64(n)), b)
		}
		return b
	}
	var n int64
	switch fs {
	case "ext2", "ext3", "ext4":
		sb := at(1024, 1024)
		le := binary.LittleEndian
		blocks := int64(le.Uint32(sb[4:]))
		if le.Uint32(sb[0x60:])&0x80 != 0 { // feature 64bit
			blocks |= int64(le.Uint32(sb[0x150:])) << 32
		}
		if bytes.Equal(sb[0x38:0x3a], []byte{0x53, 0xef}) {
			n = blocks * (1024 << le.Uint32(sb[0x18:]))
		}
	case "xfs":
		if sb := at(0, 512); string(sb[:4]) == "XFSB" {
			n = int64(binary.BigEndian.Uint64(sb[8:])) * int64(binary.BigEndian.Uint32(sb[4:]))
		}
	case "btrfs":
		if sb := at(64<<10, 4096); string(sb[0x40:0x48]) == "_BHRfS_M" {
			n = int64(binary.LittleEndian.Uint64(sb[0x70:]))
		}
	}
	if err != nil {
		return 0, api.Errorf(api.Unavailable, "read the file system on %s: %w", d.path, err)
	}
	return n, nil
}

// needsGrowth reports whether a file system leaves a part of the device unused.
func needsGrowth(d device, fs string) (bool, error) {
	have, err := d.size()
	if err != nil {
		return false, err
	}
	is, err := sizeOf(d, fs)
	return err == nil && is > 0 && have-is > filesystems[fs].slack, err
}

// growFilesystem makes a mounted file system as large as the device.
func growFilesystem(ctx context.Context, d device, fs, path string) error {
	var err error
	switch fs {
	case "xfs":
		err = runProgram(ctx, "xfs_growfs", "-d", path)
	case "btrfs":
		err = runProgram(ctx, "btrfs", "filesystem", "resize", "max", path)
	default:
		err = runProgram(ctx, "resize2fs", d.path)
	}
	if err == nil {
		slog.InfoContext(ctx, "file system grown", "type", fs, "device", d.path)
	}
	return err
}

// growOffline makes an unmounted ext file system as large as the device.
func growOffline(ctx context.Context, d device) error {
	if err := checkFilesystem(ctx, d, "-f"); err != nil {
		return err
	}
	if err := runProgram(ctx, "resize2fs", d.path); err != nil {
		return api.Errorf(api.Other, "grow the file system on %s: %w", d.path, err)
	}
	slog.InfoContext(ctx, "file system grown while not mounted", "device", d.path)
	return nil
}

// checkFilesystem makes the safe repairs of an unmounted ext file system.
func checkFilesystem(ctx context.Context, d device, flags ...string) error {
	err := runProgram(ctx, append(append([]string{"e2fsck", "-p"}, flags...), d.path)...)
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() < 4 { // 1 and 2: repaired
		return nil
	}
	if exit != nil && exit.ExitCode()&4 != 0 {
		return api.Errorf(api.Corrupt, "the file system on %s needs repair by hand: %w", d.path, err)
	}
	if err != nil {
		err = api.Errorf(api.Unavailable, "check the file system on %s: %w", d.path, err)
	}
	return err
}
