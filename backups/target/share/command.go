package share

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

const (
	// maxOutput bounds the memory for the output of mount(8), and maxReason the part of it in an error.
	maxOutput = 4096
	maxReason = 300
)

// mountAny mounts a share, an NFS export in the newest version that the server has.
func mountAny(ctx context.Context, share Share, login Credentials, place, point string) error {
	ctx, cancel := context.WithTimeout(ctx, mountTime)
	defer cancel()
	options := share.mountOptions()
	if login.User != "" {
		file := filepath.Join(place, "credentials")
		text := "username=" + login.User + "\npassword=" + login.Password + "\n"
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			return api.Errorf(api.Other, "%s: cannot write the credentials for mount.cifs: %w", share, err)
		}
		defer os.Remove(file) //nolint:errcheck // the end of the tmpfs removes the file, too
		options = append(options, "credentials="+file)
	} else if share.kind == CIFS {
		options = append(options, "guest")
	}
	var err error
	for _, version := range share.versions() {
		if err = runMount(ctx, share, login, append(options, version...), point); err == nil || ctx.Err() != nil {
			break
		}
	}
	return err
}

// runMount runs mount(8), which ends with ctx. The error has the kind of its cause and no secret.
func runMount(ctx context.Context, share Share, login Credentials, options []string, point string) error {
	// The last options win. An SMB share shows devices and programs of others like an NFS export.
	options = append(options, "nosuid", "nodev", "noexec")
	out := &limitedBuffer{}
	cmd := exec.CommandContext(ctx, "mount", "-t", string(share.kind), "-o", strings.Join(options, ","), share.source(),
		point)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // so that the helper ends with mount(8)
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	switch {
	case err == nil:
		return nil
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return api.Errorf(api.Unavailable, "%s: cannot mount the share: no answer in time; check its server", share)
	case ctx.Err() != nil:
		return api.Errorf(api.Other, "%s: cannot mount the share: %w", share, ctx.Err())
	case errors.Is(err, exec.ErrNotFound):
		return api.Errorf(api.Unsupported, "%s: cannot mount the share: this node has no mount command; install util-linux",
			share)
	}
	reason := out.reason()
	if reason == "" {
		reason = err.Error()
	}
	if login.Password != "" {
		reason = strings.ReplaceAll(reason, login.Password, login.String())
	}
	kind, remedy := kindOf(share, reason)
	return api.Errorf(kind, "%s: cannot mount the share: %s%s", share, reason, remedy)
}

// kindOf is the kind of a failure, by the words of mount(8) and its helpers.
func kindOf(share Share, reason string) (kind api.Kind, remedy string) {
	has := func(words ...string) bool {
		for _, w := range words {
			if strings.Contains(reason, w) {
				return true
			}
		}
		return false
	}
	switch {
	case has("access denied", "Permission denied", "Operation not permitted", "Required key not available"):
		return api.Denied, "; check the credentials, and the server's rules for this node"
	case has("No such device", "not supported by the system"):
		return api.Unsupported, "; load the kernel module " + string(share.kind) + " on this node"
	case has("helper program", "unknown filesystem type") && share.kind == NFS:
		return api.Unsupported, "; install the NFS client on this node (nfs-common, or nfs-utils)"
	case has("helper program", "unknown filesystem type"):
		return api.Unsupported, "; install the SMB client on this node (cifs-utils)"
	}
	return api.Unavailable, ""
}

// limitedBuffer keeps the begin of an output.
type limitedBuffer struct{ bytes.Buffer }

func (b *limitedBuffer) Write(p []byte) (int, error) {
	_, _ = b.Buffer.Write(p[:min(len(p), maxOutput-b.Len())])
	return len(p), nil
}

// reason is the output as a line of printable characters.
func (b *limitedBuffer) reason() string {
	text := strings.Join(strings.FieldsFunc(b.String(), func(r rune) bool { return r < ' ' || r == 0x7f }), "; ")
	text = strings.ToValidUTF8(text, "?")
	if len(text) > maxReason {
		text = strings.ToValidUTF8(text[:maxReason], "") + "..."
	}
	return text
}
