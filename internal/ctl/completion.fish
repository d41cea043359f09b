# fish completion for boxedctl: put it into ~/.config/fish/completions/boxedctl.fish
function __boxedctl_complete
    set -l words (commandline -opc)
    set -e words[1]
    boxedctl __complete $words (commandline -ct) 2>/dev/null
end
complete -c boxedctl -a '(__boxedctl_complete)'
