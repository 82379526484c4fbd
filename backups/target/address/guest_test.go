package address

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/share"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/backups/target/targettest/guest"
	"drover.io/drover/block/suite"
)

func TestMain(m *testing.M) { guest.Main(m) }

const (
	folders  = 20 // of each share: one for each store
	password = "hush"
)

// makeFolders makes the folders of a share.
func makeFolders(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for i := range folders {
		must(t, os.Mkdir(filepath.Join(dir, strconv.Itoa(i)), 0o700))
	}
	return dir
}

// startNFS starts nfs-ganesha with the export /backups, for NFS 4 alone: it needs neither rpcbind nor the kernel.
func startNFS(t *testing.T, port int) *targettest.Server {
	t.Helper()
	dir := t.TempDir()
	config := filepath.Join(dir, "ganesha.conf")
	must(t, os.WriteFile(config, fmt.Appendf(nil, `
NFS_CORE_PARAM { Protocols = 4; NFS_Port = %d; Bind_addr = 127.0.0.1; Enable_NLM = false; Enable_RQUOTA = false; }
NFSv4 { Graceless = true; Only_Numeric_Owners = true; RecoveryRoot = %q; }
EXPORT {
  Export_Id = 1; Path = %q; Pseudo = /backups; Access_Type = RW; Squash = No_Root_Squash; SecType = sys;
  Protocols = 4; Transports = TCP; FSAL { Name = VFS; }
}
`, port, dir, makeFolders(t)), 0o600))
	return targettest.StartServer(t, port, "ganesha.nfsd", "-F", "-f", config, "-L", filepath.Join(dir, "log"), "-p",
		filepath.Join(dir, "pid"), "-N", "WARN")
}

// startSMB starts Samba with the share backups, which demands encryption and SMB 3.1.1 of the user root.
func startSMB(t *testing.T, port int) *targettest.Server {
	t.Helper()
	dir := t.TempDir()
	config := filepath.Join(dir, "smb.conf")
	must(t, os.WriteFile(config, fmt.Appendf(nil, `[global]
server role = standalone server
server min protocol = SMB3_11
smb encrypt = required
smb ports = %d
interfaces = 127.0.0.1
bind interfaces only = yes
disable netbios = yes
load printers = no
private dir = %[2]s
lock directory = %[2]s
state directory = %[2]s
cache directory = %[2]s
pid directory = %[2]s
ncalrpc dir = %[2]s/ncalrpc
passdb backend = tdbsam:%[2]s/passdb.tdb
log file = %[2]s/log
[backups]
path = %[3]s
read only = no
`, port, dir, makeFolders(t)), 0o600))
	cmd := exec.CommandContext(t.Context(), "smbpasswd", "-c", config, "-s", "-a", "root")
	cmd.Stdin = strings.NewReader(password + "\n" + password + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("smbpasswd: %v: %s", err, out)
	}
	return targettest.StartServer(t, port, "smbd", "-F", "--no-process-group", "-s", config)
}

// TestSharesInAGuest: the kernel's clients of NFS 4 and SMB 3.1.1 keep the contract of stores on shares of nfs-ganesha
// and Samba. A server that hangs makes its own target unavailable, and no other.
func TestSharesInAGuest(t *testing.T) {
	suite.Long(t)
	nfsPort, smbPort := targettest.FreePort(t), targettest.FreePort(t)
	servers := map[string]*targettest.Server{"nfs": startNFS(t, nfsPort), "cifs": startSMB(t, smbPort)}
	control := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		signals := map[string]unix.Signal{"stop": unix.SIGSTOP, "continue": unix.SIGCONT}
		servers[r.FormValue("server")].Signal(signals[r.FormValue("do")])
	}))
	defer control.Close()
	_, controlPort, _ := strings.Cut(strings.TrimPrefix(control.URL, "http://"), ":")
	defer func() { // a stopped server does not end
		for _, s := range servers {
			s.Signal(unix.SIGCONT)
		}
	}()
	guest.Run(t, guest.Options{
		Test:     "TestSharesOfKernelClients",
		Modules:  []string{"nfsv4", "cifs", "cmac", "ccm", "gcm", "ghash-generic", "ctr", "seqiv", "sha512"},
		Programs: []string{"mount", "mount.nfs", "mount.cifs"},
		Files:    []string{"/etc/netconfig", "/etc/protocols", "/etc/services"},
		Env: map[string]string{
			"NFS":     fmt.Sprintf("nfs://%s:/backups/%%d?nfsOptions=vers=4.1,actimeo=1,timeo=300,port=%d", guest.HostAddress, nfsPort),
			"CIFS":    fmt.Sprintf("cifs://%s/backups/%%d?cifsOptions=vers=3.1.1,seal,port=%d", guest.HostAddress, smbPort),
			"CONTROL": fmt.Sprintf("http://%s:%s/", guest.HostAddress, controlPort),
		},
	})
}

// guestWorld opens targets in the guest.
type guestWorld struct {
	mounts *share.Mounts
	used   map[string]int
}

// next is the store in the next folder of a share; the result opens the store.
func (w *guestWorld) next(t *testing.T, kind string) func() (target.Store, error) {
	t.Helper()
	a, err := Parse(fmt.Sprintf(os.Getenv(kind), w.used[kind]))
	must(t, err)
	w.used[kind]++
	secret := map[string][]byte{}
	if kind == "CIFS" {
		secret[api.SecretCIFSUser], secret[api.SecretCIFSPassword] = []byte("root"), []byte(password)
	}
	return func() (target.Store, error) { return a.Open(t.Context(), secret, w.mounts) }
}

// open opens the store in the next folder of a share until the end of the test.
func (w *guestWorld) open(t *testing.T, kind string) target.Store {
	t.Helper()
	s, err := w.next(t, kind)()
	must(t, err)
	t.Cleanup(func() { must(t, s.(io.Closer).Close()) })
	return s
}

// control stops a server, or lets it continue.
func control(t *testing.T, do, kind string) {
	t.Helper()
	answer, err := http.Get(os.Getenv("CONTROL") + "?do=" + do + "&server=" + strings.ToLower(kind))
	must(t, err)
	must(t, answer.Body.Close())
}

// TestSharesOfKernelClients is the part of TestSharesInAGuest in the guest.
func TestSharesOfKernelClients(t *testing.T) {
	guest.Inside(t)
	w := &guestWorld{mounts: share.NewMounts("/mounts"), used: map[string]int{}}
	for _, kind := range []string{"NFS", "CIFS"} {
		t.Run(kind, func(t *testing.T) {
			targettest.Run(t, func(t *testing.T) target.Store { return w.open(t, kind) })
		})
	}
	for dead, other := range map[string]string{"NFS": "CIFS", "CIFS": "NFS"} {
		t.Run("a dead server of "+dead, func(t *testing.T) { w.testDeadServer(t, dead, other) })
	}
}

// testDeadServer: while a server hangs, calls of its target and the mount of another are unavailable, and name the
// share; the target of another server works, and the process starts programs. When the server is back, the target works
// again.
func (w *guestWorld) testDeadServer(t *testing.T, dead, other string) {
	s, err := w.next(t, dead)()
	must(t, err)
	t.Cleanup(func() {
		if err := s.(io.Closer).Close(); err != nil && !api.Is(err, api.Unavailable) { // calls of before may still hang
			t.Error(err)
		}
	})
	healthy, late := w.open(t, other), w.next(t, dead)
	body := targettest.Body(1<<20, 1)
	must(t, s.Put(t.Context(), "data/before", body))
	const writers = 4 // some of them are in the middle of a file when the server stops
	failures := make(chan error, writers+2)
	var writing sync.WaitGroup
	for n := range writers {
		writing.Add(1)
		go func() {
			err := s.Put(t.Context(), fmt.Sprint("locks/", n), body[:5_000])
			for writing.Done(); err == nil; {
				err = s.Put(t.Context(), fmt.Sprint("locks/", n), body[:5_000])
			}
			failures <- err
		}()
	}
	writing.Wait()
	control(t, "stop", dead)
	started := make(chan error, 1)
	go func() { started <- exec.Command("/sbin/mount", "--version").Run() }()
	go func() { _, err := s.Stat(t.Context(), "data/missing"); failures <- err }()
	go func() { _, err := late(); failures <- err }()
	for i := range 10 {
		must(t, healthy.Put(t.Context(), fmt.Sprint("data/", i), body))
	}
	for range cap(failures) {
		if err := <-failures; !api.Is(err, api.Unavailable) || !strings.Contains(err.Error(), guest.HostAddress) {
			t.Errorf("a call while the server hangs: %v of kind %v", err, api.KindOf(err))
		}
	}
	select {
	case err := <-started:
		must(t, err)
	default: // a call has waited a minute for its deadline
		t.Error("no program starts while the server hangs")
	}
	must(t, healthy.Put(t.Context(), "data/after", body))
	control(t, "continue", dead)
	for { // the client of the kernel may have an answer for earlier calls alone
		got, err := s.Get(t.Context(), "data/before", 0, int64(len(body)))
		if err == nil && bytes.Equal(got, body) {
			break
		} else if !api.Is(err, api.Unavailable) {
			t.Fatalf("a read when the server is back: %d bytes, %v of kind %v", len(got), err, api.KindOf(err))
		}
	}
}
