// Package cli is the command line of Drover: images, volumes, backups, nodes and disks as commands, in the words of the
// objects.
//
// The commands talk to the API server only, and through the API server to the reconcilers. On this machine the commands
// only inspect (preflight, mounts), and make and mount filesystems. Commands wait by watches, never by polling. Results
// go to standard output in the form of -o, for scripts; progress and remarks go to standard error, for people. The
// package owns no goroutine beyond the running command.
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
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"drover.io/drover/api"
)

// DefaultStateDir is the default state folder of `drover serve`.
const DefaultStateDir = "/var/lib/drover"

// envKubeconfig is the environment variable with the path of the kubeconfig file.
const envKubeconfig = "DROVER_KUBECONFIG"

// app is the common state of the commands of an invocation.
type app struct {
	kubeconfig string
	output     string
	timeout    time.Duration
	exporter   Exporter
	encoded    bool // a yaml document was printed: the next document needs a separator
}

// Commands returns all commands except `serve` and the roles, for the root command. The caller supplies the exporter,
// because an export needs rooms that this package may not import.
func Commands(export Exporter) []*cobra.Command {
	a := &app{exporter: export}
	cmds := []*cobra.Command{
		a.imageCommand(), a.volumeCommand(), a.snapshotCommand(), a.backupCommand(), a.targetCommand(), a.nodeCommand(),
		a.diskCommand(), a.preflightCommand(), a.versionCommand(),
	}
	for _, c := range cmds {
		a.addFlags(c.PersistentFlags())
		c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
			return usagef("%w; see `%s --help`", err, c.CommandPath())
		})
		silenceErrors(c)
		a.completeFlags(c)
	}
	return cmds
}

// silenceErrors leaves the printing of errors to ExitCode's caller: one line without the usage text.
func silenceErrors(c *cobra.Command) {
	c.SilenceUsage, c.SilenceErrors = true, true
	for _, sub := range c.Commands() {
		silenceErrors(sub)
	}
}

func (a *app) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&a.kubeconfig, "kubeconfig", "",
		"file with the address of the API server\n(default: $"+envKubeconfig+", then "+DefaultStateDir+
			"/kubeconfig, then $KUBECONFIG)")
	fs.StringVarP(&a.output, "output", "o", "table", "form of the output: table, wide, json, yaml or name")
	fs.DurationVar(&a.timeout, "timeout", 0, "give up waiting after this long; the work continues (0: wait)")
}

// Exit codes, beside 0 and 130 (interrupted).
const (
	exitFailed      = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitTimeout     = 4 // the wait timed out; the work continues
	exitConflict    = 5 // the state forbids the command: exists, in use, attached
	exitUnreachable = 6 // the API server does not answer
)

// errTimeout marks an error as a timeout.
var errTimeout = errors.New("timed out")

// usageError is an invalid command line.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// ExitCode returns the exit code of the process for a command's error.
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

// Report writes a command's error as a sentence, and returns the exit code of the process.
func Report(w io.Writer, err error) int {
	code := ExitCode(err)
	if err != nil {
		fmt.Fprintln(w, "drover:",
			api.PlainText(strings.ReplaceAll(err.Error(), context.Canceled.Error(), "interrupted")))
	}
	return code
}

// checkArgs wraps cobra's argument checks so that a violation counts as wrong usage and names the command.
func checkArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, a []string) error {
		if err := check(c, a); err != nil {
			return usagef("%w; usage: %s", err, c.UseLine())
		}
		return nil
	}
}

// kubeconfigPath finds the kubeconfig, or returns an error with the searched places.
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
	return "", api.Errorf(api.Unavailable, "no API server is known: start `drover serve` on this machine, or name a "+
		"kubeconfig with --kubeconfig or $%s (looked for %s)", envKubeconfig, def)
}

var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	if err := errors.Join(api.AddToScheme(s), corev1.AddToScheme(s), eventsv1.AddToScheme(s)); err != nil {
		panic(err) // a kind registered twice, which every test would find
	}
	return s
}()

// newRESTMapper knows Drover's kinds, so that no command starts with a discovery.
func newRESTMapper() meta.RESTMapper {
	m := meta.NewDefaultRESTMapper(nil)
	for kind := range scheme.KnownTypes(api.GroupVersion) {
		m.Add(api.GroupVersion.WithKind(kind), meta.RESTScopeRoot)
	}
	m.Add(corev1.SchemeGroupVersion.WithKind("Secret"), meta.RESTScopeNamespace)
	m.Add(eventsv1.SchemeGroupVersion.WithKind("Event"), meta.RESTScopeNamespace)
	return m
}

// newClient creates a client without a request to the server.
func (a *app) newClient() (client.WithWatch, error) {
	if err := a.checkOutput(); err != nil {
		return nil, err
	}
	cfg, err := a.loadConfig()
	if err != nil {
		return nil, err
	}
	return newClient(cfg)
}

// loadConfig returns the configuration for the API server.
func (a *app) loadConfig() (*rest.Config, error) {
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
	ctrllog.SetLogger(logr.Discard()) // a command prints its own errors
	cfg = rest.CopyConfig(cfg)
	cfg.QPS = -1 // a person's command never waits for a client-side rate limit
	c, err := client.NewWithWatch(cfg, client.Options{Scheme: scheme, Mapper: newRESTMapper()})
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "client for %s: %w", cfg.Host, err)
	}
	return c, nil
}

// withTimeout limits the command's context by --timeout.
func (a *app) withTimeout(c *cobra.Command) (context.Context, context.CancelFunc) {
	ctx := c.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	if a.timeout <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, a.timeout, fmt.Errorf("%w after %s", errTimeout, a.timeout))
}

// groupCommand is a command with subcommands only.
func groupCommand(use, short string, aliases ...string) *cobra.Command {
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
