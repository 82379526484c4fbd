// Package cli is the command line of Drover: images, volumes, nodes and disks as commands, in the words of the objects.
//
// It talks to the API server only, and through it to whoever makes the wishes true; what it does on this machine itself
// is to look (preflight, mounts) and to make and mount filesystems. It waits by watching, never by polling. Results go
// to standard output in the form that -o asks for, progress and remarks to standard error, so that scripts can read
// the one and people the other. The package owns no goroutine beyond the command that runs.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"drover.io/drover/api"
)

// DefaultStateDir is where `drover serve` keeps its state unless told otherwise.
const DefaultStateDir = "/var/lib/drover"

// Environment variable that names the kubeconfig file.
const envKubeconfig = "DROVER_KUBECONFIG"

// app is what the commands of one invocation share.
type app struct {
	kubeconfig string
	output     string
	timeout    time.Duration
	exporter   Exporter
	encoded    bool // something was printed as yaml: what follows is another document
}

// Commands returns everything that a user types but `serve` and the roles: add them to the root command. What an export
// does needs more of the house than a command may know, so it is given.
func Commands(export Exporter) []*cobra.Command {
	a := &app{exporter: export}
	cmds := []*cobra.Command{
		a.imageCommand(), a.volumeCommand(), a.snapshotCommand(), a.nodeCommand(),
		a.diskCommand(), a.preflightCommand(), a.versionCommand(),
	}
	for _, c := range cmds {
		a.addFlags(c.PersistentFlags())
		c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
			return usagef("%w; see `%s --help`", err, c.CommandPath())
		})
		quiet(c)
		a.completeFlags(c)
	}
	return cmds
}

// quiet leaves the printing of errors to ExitCode's caller: one line, without the usage text behind it.
func quiet(c *cobra.Command) {
	c.SilenceUsage, c.SilenceErrors = true, true
	for _, sub := range c.Commands() {
		quiet(sub)
	}
}

func (a *app) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&a.kubeconfig, "kubeconfig", "",
		"file that says where the API server is\n(default: $"+envKubeconfig+", then "+DefaultStateDir+
			"/kubeconfig, then $KUBECONFIG)")
	fs.StringVarP(&a.output, "output", "o", "table", "what to print: table, json, yaml or name")
	fs.DurationVar(&a.timeout, "timeout", 0, "give up waiting after this long; the work goes on (0: wait)")
}

// Exit codes, beside 0 and 130 (interrupted).
const (
	exitFailed      = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitTimeout     = 4 // gave up waiting; the work goes on
	exitConflict    = 5 // the state forbids it: exists, in use, attached
	exitUnreachable = 6 // the API server does not answer
)

// errTimeout marks an error as "gave up waiting".
var errTimeout = errors.New("timed out")

// usageError is a command line that can never work.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// ExitCode is the exit code of the process for what a command returned.
func ExitCode(err error) int {
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		return exitUsage
	case errors.Is(err, errTimeout):
		return exitTimeout
	case errors.Is(err, context.Canceled):
		return 130
	}
	switch api.KindOf(err) {
	case api.Invalid, api.OutOfRange:
		return exitUsage
	case api.NotFound:
		return exitNotFound
	case api.Exists, api.InUse, api.Busy:
		return exitConflict
	case api.Unavailable:
		return exitUnreachable
	}
	return exitFailed
}

// Report writes what a command returned as one sentence, and gives the exit code of the process.
func Report(w io.Writer, err error) int {
	code := ExitCode(err)
	if err != nil {
		fmt.Fprintln(w, "drover:", strings.ReplaceAll(err.Error(), context.Canceled.Error(), "interrupted"))
	}
	return code
}

// args wraps cobra's argument checks so that a violation counts as wrong usage and names the command.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, a []string) error {
		if err := check(c, a); err != nil {
			return usagef("%w; usage: %s", err, c.UseLine())
		}
		return nil
	}
}

// kubeconfigPath finds the kubeconfig, or says where it looked.
func (a *app) kubeconfigPath() (string, error) {
	if a.kubeconfig != "" {
		return a.kubeconfig, nil
	}
	if p := os.Getenv(envKubeconfig); p != "" {
		return p, nil
	}
	def := filepath.Join(DefaultStateDir, "kubeconfig")
	_, err := os.Stat(def)
	if err == nil {
		return def, nil
	}
	if p := os.Getenv("KUBECONFIG"); p != "" {
		return p, nil
	}
	if errors.Is(err, os.ErrPermission) {
		return "", api.Errorf(api.Denied, "cannot read %s: run this as root, or name a kubeconfig with --kubeconfig", def)
	}
	return "", api.Errorf(api.Unavailable, "no API server known: start `drover serve` on this machine, or say where it "+
		"is with --kubeconfig or $%s (looked for %s)", envKubeconfig, def)
}

var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	if err := errors.Join(api.AddToScheme(s), eventsv1.AddToScheme(s)); err != nil {
		panic(err) // a kind registered twice: cannot happen in a binary that passed any test
	}
	return s
}()

// mapper knows our kinds, so that no command begins with a round of discovery.
func mapper() meta.RESTMapper {
	m := meta.NewDefaultRESTMapper(nil)
	for kind := range scheme.KnownTypes(api.GroupVersion) {
		m.Add(api.GroupVersion.WithKind(kind), meta.RESTScopeRoot)
	}
	m.Add(eventsv1.SchemeGroupVersion.WithKind("Event"), meta.RESTScopeNamespace)
	return m
}

// connect makes a client. It does not talk to the server yet.
func (a *app) connect() (client.WithWatch, error) {
	if err := a.checkOutput(); err != nil {
		return nil, err
	}
	cfg, err := a.config()
	if err != nil {
		return nil, err
	}
	return newClient(cfg)
}

// config is how the API server is reached.
func (a *app) config() (*rest.Config, error) {
	path, err := a.kubeconfigPath()
	if err != nil {
		return nil, err
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "kubeconfig %s: %w", path, err)
	}
	return cfg, nil
}

func newClient(cfg *rest.Config) (client.WithWatch, error) {
	ctrllog.SetLogger(logr.Discard()) // a command speaks for itself
	cfg = rest.CopyConfig(cfg)
	cfg.QPS = -1 // a person's command never waits for a client-side rate limiter
	c, err := client.NewWithWatch(cfg, client.Options{Scheme: scheme, Mapper: mapper()})
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "client for %s: %w", cfg.Host, err)
	}
	return c, nil
}

// bounded is the command's context under --timeout.
func (a *app) bounded(c *cobra.Command) (context.Context, context.CancelFunc) {
	ctx := c.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	if a.timeout <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, a.timeout, fmt.Errorf("%w after %s", errTimeout, a.timeout))
}

// group is a command that only holds others.
func group(use, short string, aliases ...string) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Aliases: aliases,
		RunE: func(c *cobra.Command, left []string) error {
			if len(left) > 0 {
				return usagef("%s has no command %q: see `%s --help`", c.CommandPath(), left[0], c.CommandPath())
			}
			return c.Help()
		},
	}
}
